"""Runs recipes/preferences/dpo.py: DPO and IPO have moved there."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "recipes/preferences/dpo.py"), run_name="__main__")
