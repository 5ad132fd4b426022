# From a fresh clone: `make demo`, `make test`. From elsewhere: `make -C path/to/lmpo demo`. Paths here are relative,
# so that the folder may have spaces in its name.

PYTHON = python3
SEED = 0
VENV_PYTHON = .venv/bin/python

# By uv where it is there; by pip where it is not, or where uv does not know the index that pip is set to.
install = { command -v uv >/dev/null && uv pip install -q --python $(VENV_PYTHON) $(1); } || \
	$(VENV_PYTHON) -m pip install -q --disable-pip-version-check $(1)

help:
	@echo "make demo [SEED=0]   train models/tiny on Countdown (installs into .venv first)"
	@echo "make test            ruff, then minutes of tests: formulas, models, sampler, graders, settings, resume, one mesh"
	@echo "make test-all        all tests: meshes, hosts, kills, compiled programs, browser, golden runs, too"
	@echo "make readme          every command of README.md and docs, cut short, in fresh clones"
	@echo "make lint            ruff alone"
	@echo "PYTHON=python3.12    which Python (3.11 or newer) makes .venv"

demo: .venv/installed
	@echo "training takes two to four minutes on two CPU cores; Ctrl-C stops it, and says how to go on"
	$(VENV_PYTHON) core/grpo.py --config configs/demo.py --seed $(SEED)

test: lint
	$(VENV_PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: lint
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(VENV_PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m ""

readme: .venv/installed-test
	$(VENV_PYTHON) tests/readme.py

lint: .venv/installed-test
	$(VENV_PYTHON) -m ruff check .

# The stamps are renewed when the requirements change, and only after pip has succeeded.
.venv/installed: requirements.txt | $(VENV_PYTHON)
	@echo "installing requirements.txt into .venv: 1.4 GB, about a minute"
	@$(call install,-r requirements.txt)
	@touch $@

.venv/installed-test: requirements-test.txt requirements.txt | $(VENV_PYTHON)
	@echo "installing requirements.txt and requirements-test.txt into .venv: 2 GB, about two minutes"
	@$(call install,-r requirements.txt -r requirements-test.txt)
	@touch $@

$(VENV_PYTHON):
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
		echo "lmpo needs Python 3.11 or newer, and '$(PYTHON)' is not: try make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.PHONY: help demo test test-all readme lint
