# make test       lint, types, tests and doctests: what CI runs
# make test-slow  the tests that take long: load, kills, clusters, compilers
# make fuzz       the readers of files on made-up and damaged input, for FUZZ_SECONDS
# make coverage   which lines of src the tests run
# make audit      what bandit says of the source, and pip-audit of the pinned versions
# make demo       train, soften, certify and measure a small ViT offline; writes demo/report.html
# make docs       the documentation as a site, in site/, built strictly
# make bench      the programs in benchmarks/, each of which prints a table
# make clean      remove everything that these targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# A benchmark against EMLP needs an interpreter that has it (see the head of the file): make bench EMLP_PYTHON=...
EMLP_PYTHON ?=
BENCHMARKS = benchmarks/spectra.py benchmarks/grid_actions.py benchmarks/baselines.py  # the others need a GPU, or weights and images

FUZZ_SECONDS ?= 300
# B101: asserts tell mypy a type. B311: chance that turns pictures guards no secret. B615: users name the models that
# they open, of which JSON and safetensors are read (docs/security.md).
BANDIT_SKIPS = B101,B311,B615

SETUP_COST = The first run installs about 1.6 GB into $(VENV) (CPU build of torch), in one to two minutes.

.PHONY: test test-slow fuzz coverage audit demo docs bench setup clean

test:
	@echo "make test: lint, types, tests and doctests, about five minutes on two idle cores. $(SETUP_COST)"
	@$(MAKE) --no-print-directory setup
	$(BIN)/ruff check .
	$(BIN)/mypy src
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow:
	@echo "make test-slow: tests of load, kills and clusters, about four minutes on two cores, and Ray, 250 MB more into $(VENV). $(SETUP_COST)"
	@$(MAKE) --no-print-directory setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[ray]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 -m slow

# One round after the other, each with examples of its own, until the time is spent; the first failure ends it.
fuzz:
	@echo "make fuzz: $(FUZZ_SECONDS) seconds, and the round that is then under way; FUZZ_SECONDS=60 for less."
	@$(MAKE) --no-print-directory setup
	@end=$$(( $$(date +%s) + $(FUZZ_SECONDS) )); while [ $$(date +%s) -lt $$end ]; do \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_fuzz.py -n 2 --hypothesis-profile=fuzz || exit 1; done

coverage:
	@echo "make coverage: the tests of make test with fewer examples, about as long. $(SETUP_COST)"
	@$(MAKE) --no-print-directory setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" --hypothesis-profile=coverage \
	--cov=softequiv --cov-report=term-missing:skip-covered --cov-fail-under=95

audit:
	@echo "make audit: bandit and pip-audit, which asks a service on the network. $(SETUP_COST)"
	@$(MAKE) --no-print-directory setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check bandit pip-audit
	$(BIN)/bandit --quiet --recursive src --skip $(BANDIT_SKIPS)
	$(BIN)/pip-audit --disable-pip --no-deps --requirement constraints.txt

demo:
	@echo "make demo: a small ViT on digits, a minute and a half on two cores, again in seconds. $(SETUP_COST)"
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
	rm -rf $(VENV) build dist site demo demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
