# make demo    compile, verify and train examples/gpt.py on 8 CPU processes
# make test    the tests that take a contributor some minutes: all but the slow ones
# make test-all  every test; CI runs these (PROCESSOR_TIMES=FILE writes what each one costs)
# make models  a table: every model on every mesh, verified in fp64 (ARGS="--quick --only 'gpt*'")
# make zoo     a table: architectures of Hugging Face, torchvision, timm and diffusers, compiled and verified in fp64
# make strategies  ZeRO x recomputation x schedules x meshes on three models, verified in fp64
# make independent  a table: models unlike the others, trained by packages and by plain loops, ends compared in fp64
# make fuzz    random programs, meshes and schedules for 10 minutes (MINUTES=2 SEED=7)
# make check   formatting, lint, types
# make bench   compile times and step times
# make docs    the pages of docs/ as a site in site/; warnings are errors
# make refresh the quoted code and pictures of README.md and docs/, made anew
# Each sets up .venv by itself. Another interpreter: make PYTHON=python3.12 demo

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MESH ?= 2x2x2
BUILD ?= build
WORKERS ?= 2

.PHONY: demo test test-all models zoo sizes strategies independent fuzz check bench docs refresh clean

demo: $(VENV)/.partc
	$(BIN)/partc compile examples/gpt.py --mesh $(MESH) --microbatches 4 -o "$(BUILD)"
	$(BIN)/partc verify "$(BUILD)"
	$(BIN)/partc run "$(BUILD)" --steps 20

test: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations=10 -m "not matrix and not slow" $(ARGS)

test-all: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations=10 -m "not matrix" $(ARGS)

models: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python tests/benchmarks/models.py --workers $(WORKERS) $(ARGS)

zoo: $(VENV)/.zoo
	PYTHONPATH=$(CURDIR)/$(VENV)/zoo OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python tests/benchmarks/zoo.py $(ARGS)

sizes: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python tests/benchmarks/compile_time.py $(ARGS)

strategies: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python tests/benchmarks/strategies.py --workers $(WORKERS) $(ARGS)

independent: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m tests.independent --workers $(WORKERS) $(ARGS)

fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy partc

bench: $(VENV)/.dev
	for benchmark in "tests/benchmarks/compile_time.py --growth" tests/benchmarks/step_time.py; do $(BIN)/python $$benchmark || exit 1; done

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet

refresh: $(VENV)/.dev
	$(BIN)/python -m tests.documentation

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "partc needs Python 3.10 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.partc: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'
	@touch $@ $(VENV)/.partc

# The libraries have a folder of their own: torchvision's wheel would bring another torch, and transformers would use it.
$(VENV)/.zoo: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/zoo \
	  torchvision==0.28.0 timm diffusers requests urllib3 certifi idna charset_normalizer regex httpx importlib_metadata pillow
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
