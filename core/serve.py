"""Says where the endpoint is: recipes/agents/serve.py."""

import sys

if __name__ == "__main__":
    sys.exit("error: core/serve.py has moved: run python recipes/agents/serve.py with the same options")
