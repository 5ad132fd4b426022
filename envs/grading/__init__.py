MAX_BOX = 5000  # characters of an answer in a box, or on a line
