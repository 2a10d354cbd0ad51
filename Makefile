# make test    lint, types, tests and doctests: what CI runs
# make demo    train, soften, certify and measure a small ViT offline; writes demo/report.html
# make docs    the documentation as a site, in site/, built strictly
# make bench   the programs in benchmarks/, each of which prints a table
# make clean   remove everything that these targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# A benchmark against EMLP needs an interpreter that has it (see the head of the file): make bench EMLP_PYTHON=...
EMLP_PYTHON ?=
BENCHMARKS = benchmarks/spectra.py benchmarks/grid_actions.py benchmarks/baselines.py  # the others need a GPU, or weights and images

SETUP_COST = The first run installs about 1.6 GB into $(VENV) (CPU build of torch), in one to two minutes.

.PHONY: test demo docs bench setup clean

test:
	@echo "make test: lint, types, tests and doctests, about seven minutes on two cores. $(SETUP_COST)"
	@$(MAKE) --no-print-directory setup
	$(BIN)/ruff check .
	$(BIN)/mypy src
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

demo:
	@echo "make demo: a small ViT on digits, about a minute on two cores, again in seconds. $(SETUP_COST)"
	@$(MAKE) --no-print-directory setup
	$(BIN)/softequiv demo

docs:
	@echo "make docs: the pages as a site in site/, about 20 seconds, and 60 MB more into $(VENV). $(SETUP_COST)"
	@$(MAKE) --no-print-directory setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench:
	@echo "make bench: timings, several minutes; keep the machine otherwise idle. $(SETUP_COST)"
	@$(MAKE) --no-print-directory setup
	@set -e; for program in $(BENCHMARKS); do echo "== $$program"; $(BIN)/python $$program; done
	@if [ -n "$(EMLP_PYTHON)" ]; then echo "== benchmarks/emlp_reference.py"; $(EMLP_PYTHON) benchmarks/emlp_reference.py; \
	else echo "benchmarks/emlp_reference.py left out: set EMLP_PYTHON to an interpreter that has emlp"; fi

setup: $(STAMP)
	@:

# Made again only when the requirements change. -qq: errors only.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist site demo demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
