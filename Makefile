# Each target makes or mends .venv by itself; `make` alone lists the targets.
# PYTHON names another base interpreter, as in `make test PYTHON=python3.12`.

BIN := .venv/bin
CODE := .
# The core is gated at 100 %; the adapters are only reported.
CORE := --include='src/lifecycle/*'
# Apart, so that what walks the heap does not find torch and eight frameworks there.
PURE := tests/core tests/sim tests/others
# gpu-check runs where nothing may be installed: whatever Python is there will do.
PY ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

MAKEFLAGS += --no-print-directory
# The tools use the cores themselves; in order, the first failure is the last word.
.NOTPARALLEL:
export PYTHON

.PHONY: help demo test serve bench bench-memory bench-overload docs lint types pytest wheel sbom attack soak \
  faults hang-ups coverage-of-cases gpu-check clean

help:
	@echo 'make demo       run the server, a real engine and 32 unreliable clients; show that nothing leaks'
	@echo 'make serve      start the server and leave it running, with a curl line to try'
	@echo 'make test       everything that must pass: lint, types, docs, tests, coverage, examples, wheel'
	@echo 'make lint       ruff and flake8-async'
	@echo 'make types      mypy, strict'
	@echo 'make pytest     the tests with coverage; make pytest ARGS="-k gate" runs some of them'
	@echo 'make wheel      build the wheel and import it with anyio alone installed'
	@echo 'make sbom       what the wheel brings along with all its extras, as CycloneDX'
	@echo 'make attack     a thousand made-up requests to each HTTP endpoint; make attack ARGS=100 for fewer'
	@echo 'make soak       a million seeded schedules of the core; make soak ARGS=5000 for fewer'
	@echo 'make faults     the engine link under kills, stops, leavers and mutated frames; make faults ARGS=50 for fewer kills'
	@echo 'make hang-ups   an hour of clients that hang up, on a server of its own; make hang-ups ARGS=20 for minutes'
	@echo 'make coverage-of-cases  which known failures of such servers have a test, or a reason why not'
	@echo 'make bench      the figures of the documentation, measured again; those of its charts by the next two'
	@echo 'make bench-memory  what bounds the memory: a gate, letting go, or both; a quarter of an hour'
	@echo 'make bench-overload  what becomes of ten times too many requests; a quarter of an hour'
	@echo 'make docs       the documentation, as HTML under docs/_build/html'
	@echo 'make gpu-check  the engine on a CUDA device, with the Python that is there (PY=...)'
	@echo 'make clean      remove .venv and everything built'

demo: .venv/.ready
	@$(BIN)/lifecycle-engine demo $(ARGS)

serve: .venv/.ready
	@$(BIN)/lifecycle-engine serve --hints $(ARGS)

test: lint types docs pytest wheel

lint: .venv/.ready
	@echo '== lint'
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --quiet --check $(CODE) || { \
	  echo 'not formatted as above: run $(BIN)/ruff format $(CODE)'; exit 1; }
	@$(BIN)/flake8 --isolated --select=ASYNC1,ASYNC2,ASYNC3 --extend-ignore=ASYNC109,ASYNC124 \
	  src adapters examples

types: .venv/.ready
	@echo '== types'
	@$(BIN)/mypy --no-error-summary

ifdef ARGS
pytest: .venv/.ready
	@$(BIN)/python -m pytest -q $(ARGS)
else
pytest: .venv/.ready
	@echo '== tests of the core'
	@$(BIN)/python -m coverage run -m pytest -q $(PURE)
	@echo '== all other tests'
	@$(BIN)/python -m coverage run --append -m pytest -q tests $(addprefix --ignore=,$(PURE))
	@echo '== branch coverage of the adapters (reported only)'
	@$(BIN)/python -m coverage report --include='adapters/*' | tail -n 1
	@echo '== branch coverage of the core (must be 100 %)'
	@$(BIN)/python -m coverage report $(CORE) --fail-under=100 --show-missing --skip-covered
endif

wheel: .venv/.ready
	@echo '== wheel'
	@sh scripts/check-wheel.sh

sbom: .venv/.ready
	@mkdir -p build
	@$(BIN)/python scripts/sbom.py >build/sbom.json
	@echo build/sbom.json

attack: .venv/.ready
	@$(BIN)/python tests/http/attack.py $(or $(ARGS),1000)

soak: .venv/.ready
	@$(BIN)/python tests/sim/soak.py $(or $(ARGS),1000000)

faults: .venv/.ready
	@$(BIN)/python tests/lifecycle_zmq/fuzz.py
	@$(BIN)/python tests/lifecycle_zmq/fuzz_pair.py
	@$(BIN)/python tests/lifecycle_zmq/disconnects.py
	@$(BIN)/python tests/lifecycle_zmq/disconnects.py --trio
	@for what in kills orphans stops; do \
	  $(BIN)/python tests/lifecycle_zmq/endurance.py $$what --count $(or $(ARGS),500) || exit 1; done
	@$(BIN)/python tests/lifecycle_zmq/endurance.py holds --minutes 5 --engines 12

hang-ups: .venv/.ready
	@$(BIN)/python tests/http/hang_ups.py --minutes $(or $(ARGS),60)

coverage-of-cases: .venv/.ready
	@$(BIN)/python scripts/coverage_of_cases.py

bench: .venv/.ready
	@for file in core bench_payload link arena liveness engine on_ray; do \
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
	@PYTHONPATH=src:adapters $(PY) benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf .venv build dist docs/_build .coverage* \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src adapters tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: pyproject.toml constraints/cpu.txt scripts/setup.sh
	@sh scripts/setup.sh

.venv/.docs: .venv/.ready
	@sh scripts/setup.sh docs

.DEFAULT:
	@echo "There is no target '$@'. These are the targets:" >&2
	@$(MAKE) help >&2
	@exit 2
