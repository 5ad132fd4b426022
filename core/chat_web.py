"""Names the place to which the chat in a browser has moved."""

if __name__ == "__main__":
    raise SystemExit("error: core/chat_web.py is now extras/chat_web.py: call that, with the same options")
