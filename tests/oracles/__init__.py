"""What tests compare with: loops and float64 formulas written from definitions, not from the code. Read first."""
