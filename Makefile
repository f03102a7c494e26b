# Each target makes or mends .venv by itself; `make` alone lists the targets.
# PYTHON names another base interpreter, as in `make test PYTHON=python3.12`.

BIN := .venv/bin
CODE := .
# gpu-check runs where nothing may be installed: whatever Python is there will do.
PY ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

MAKEFLAGS += --no-print-directory
# The tools use the cores themselves; in order, the first failure is the last word.
.NOTPARALLEL:
export PYTHON

.PHONY: help demo quick test prove serve load bench bench-memory bench-overload docs lint types pytest coverage release-check sbom update canary strangers attack soak \
  faults hang-ups models mutation coverage-of-cases gpu-check clean

help:
	@echo 'make demo       run the server, a real engine and 32 unreliable clients; show that nothing leaks'
	@echo 'make serve      start the server and leave it running, with a curl line to try'
	@echo 'make quick      while you work: lint, types of changed files, tests of the core and of ASGI'
	@echo 'make test       before you push: lint, types, docs, examples, tests, coverage of the core'
	@echo 'make prove      the long rest: 50,000 schedules, mutants, storms, kills, fuzzing, wheel'
	@echo 'make lint       ruff and flake8-async'
	@echo 'make types      mypy, strict'
	@echo 'make pytest     the tests of make test; make pytest ARGS="tests/core -k gate" runs some of them'
	@echo 'make coverage   branch coverage of all packages by the tests of make test'
	@echo 'make release-check  build what a release has, and look at it as a stranger would'
	@echo 'make sbom       what the wheel brings along with all its extras, as CycloneDX'
	@echo 'make update     move the pinned versions to the newest releases, if make test passes with them'
	@echo 'make canary     try the newest and the oldest releases that are permitted; ARGS=newest for one of them'
	@echo 'make strangers  try the drop-ins in real servers, by their own command lines; ARGS=vllm for one of them'
	@echo 'make attack     a thousand made-up requests to each HTTP endpoint; make attack ARGS=100 for fewer'
	@echo 'make soak       a million seeded schedules of the core; make soak ARGS=5000 for fewer'
	@echo 'make faults     the engine link under kills, stops, leavers and mutated frames; make faults ARGS=50 for fewer kills'
	@echo 'make hang-ups   an hour of clients that hang up, on a server of its own; make hang-ups ARGS=20 for minutes'
	@echo 'make models     visit all states of the models of tests/models with SPIN, and record how many'
	@echo 'make mutation   every small mistake in the core against its tests, for hours; make mutation ARGS="--sample 50"'
	@echo 'make coverage-of-cases  which known failures of such servers have a test, or a reason why not'
	@echo 'make load       a small load test of a server; make load ARGS="--url http://127.0.0.1:8000"'
	@echo 'make bench      the figures of the documentation, measured again; those of its charts by the next two'
	@echo 'make bench-memory  what bounds the memory: a gate, letting go, or both; a quarter of an hour'
	@echo 'make bench-overload  what becomes of ten times too many requests; a quarter of an hour'
	@echo 'make docs       the documentation, as HTML under docs/_build/html'
	@echo 'make gpu-check  the engine on a CUDA device, with the Python that is there (PY=...)'
	@echo 'make clean      remove .venv and everything built'

demo: .venv/.ready
	@$(BIN)/python -m lifecycle_demo $(ARGS)

# On the tiny checkpoint, unless ARGS names another model.
serve: .venv/.ready
ifneq ($(filter --runner% --checkpoint%,$(ARGS)),)
	@$(BIN)/lifecycle serve --hints $(ARGS)
else
	@tiny=$$($(BIN)/python -m tiny_checkpoint) && \
	  exec $(BIN)/lifecycle serve --hints --checkpoint "$$tiny" $(ARGS)
endif

quick: .venv/.ready
	@$(BIN)/python scripts/check.py quick $(ARGS)

test: .venv/.docs
	@$(BIN)/python scripts/check.py test $(ARGS)

prove: .venv/.ready
	@$(BIN)/python scripts/check.py prove $(ARGS)

lint: .venv/.ready
	@echo '== lint'
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --quiet --check $(CODE) || { \
	  echo 'not formatted as above: run $(BIN)/ruff format $(CODE)'; exit 1; }
	@$(BIN)/flake8 --isolated --select=ASYNC1,ASYNC2,ASYNC3 --extend-ignore=ASYNC109,ASYNC124 \
	  $$(grep -rlE 'async |anyio|trio' --include='*.py' src adapters tools examples)

types: .venv/.ready
	@echo '== types'
	@$(BIN)/mypy --no-error-summary

ifdef ARGS
pytest: .venv/.ready
	@$(BIN)/python -m pytest -q $(ARGS)
else
pytest: .venv/.ready
	@$(BIN)/python scripts/check.py test core others
endif

coverage: .venv/.ready
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' --cov --cov-report=term:skip-covered tests

release-check: .venv/.ready
	@$(BIN)/python scripts/release.py $(ARGS)

sbom: .venv/.ready
	@mkdir -p build
	@$(BIN)/python scripts/sbom.py >build/sbom.json
	@echo build/sbom.json

update: .venv/.ready
	@$(BIN)/python scripts/versions.py update

canary: .venv/.ready
	@$(BIN)/python scripts/versions.py canary $(ARGS)

strangers: .venv/.ready
	@$(BIN)/python scripts/strangers.py $(ARGS)

attack: .venv/.ready
	@$(BIN)/python tests/http/attack.py $(or $(ARGS),1000)

soak: .venv/.ready
	@$(BIN)/python tests/sim/soak.py $(or $(ARGS),1000000)

faults: .venv/.ready
	@$(BIN)/python tests/lifecycle_zmq/fuzz.py
	@$(BIN)/python tests/lifecycle_zmq/fuzz_pair.py
	@$(BIN)/python tests/lifecycle_zmq/fuzz_link.py
	@$(BIN)/python tests/lifecycle_zmq/disconnects.py
	@$(BIN)/python tests/lifecycle_zmq/disconnects.py --trio
	@for what in kills orphans stops; do \
	  $(BIN)/python tests/lifecycle_zmq/endurance.py $$what --count $(or $(ARGS),500) || exit 1; done
	@$(BIN)/python tests/lifecycle_zmq/endurance.py holds --minutes 5 --engines 12

hang-ups: .venv/.ready
	@$(BIN)/python tests/http/hang_ups.py --minutes $(or $(ARGS),60)

models: .venv/.ready
	@$(BIN)/python tests/models/model_checker.py

mutation: .venv/.ready
	@nice -n 15 $(BIN)/python scripts/mutation.py $(ARGS)

coverage-of-cases: .venv/.ready
	@$(BIN)/python scripts/coverage_of_cases.py

load: .venv/.ready
	@$(BIN)/python benchmarks/load.py $(ARGS)

bench: .venv/.ready
	@for file in core link arena engine drafts; do \
	  echo "== $$file"; $(BIN)/python "benchmarks/$$file.py" || exit 1; done

bench-memory: .venv/.ready
	@$(BIN)/python benchmarks/memory.py $(ARGS)
	@$(BIN)/python benchmarks/draw.py memory

bench-overload: .venv/.ready
	@$(BIN)/python benchmarks/overload.py $(ARGS)
	@$(BIN)/python benchmarks/draw.py overload

docs: .venv/.docs
	@echo '== docs'
	@$(BIN)/sphinx-build -q -W -n docs docs/_build/html
	@echo "docs/_build/html/index.html"

gpu-check:
	@PYTHONPATH=src:adapters:tools $(PY) benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf .venv build dist docs/_build .coverage* \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src adapters tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

FORCE:

# Whether .venv has the Python that is named, the script sees.
.venv/.ready: pyproject.toml constraints/tested.txt scripts/setup.sh $(if $(PYTHON),FORCE)
	@sh scripts/setup.sh

.venv/.docs: .venv/.ready
	@sh scripts/setup.sh docs

.DEFAULT:
	@echo "There is no target '$@'. These are the targets:" >&2
	@$(MAKE) help >&2
	@exit 2
