# Every target sets up what it needs in .venv, once; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
CHECKPOINT := checkpoints/small-deepseek-v3
RUN := $(BIN)/moe-runtime

.PHONY: help setup demo test soak check aot bench clean

help:
	@echo "make demo    a small checkpoint, a prefill EP 2 / decode EP 4 plan, a trace replayed, a report"
	@echo "make test    the test suite (15 minutes at most on 2 cores)"
	@echo "make check   format, lint, types, layering"
	@echo "make aot     compile every Triton kernel for sm_90, sm_100 and gfx942, without any of them"
	@echo "make soak    full grids and long repetitions; then processes, held to their times"
	@echo "make bench   speed against transformers on the same checkpoint"

setup: $(SETUP)

$(SETUP): pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[dev,mpi]'
	touch $(SETUP)

$(CHECKPOINT): | $(SETUP)
	$(RUN) make-checkpoint --family deepseek_v3 --size small --out $@

demo: $(SETUP) $(CHECKPOINT)
	$(RUN) check configs/demo.yaml
	mkdir -p runs
	$(RUN) bench configs/demo.yaml --trace configs/demo_trace.jsonl --out runs/demo.json
	$(RUN) report runs/demo.json --html runs/demo.html > /dev/null

# Tiny models: a second thread per process only costs. Tests that start processes run one at a time.
test: $(SETUP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not soak and not multiproc" $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "multiproc and not soak" $(PYTEST_ARGS)

soak: $(SETUP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak $(PYTEST_ARGS)
	MOE_RUNTIME_STRICT_TIME=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "multiproc and not soak" $(PYTEST_ARGS)

check: $(SETUP)
	scripts/check

aot: $(SETUP)
	$(BIN)/python -m moe_runtime.kernels.aot $(AOT_ARGS)

bench: $(SETUP) $(CHECKPOINT)
	$(BIN)/python benchmarks/speed.py $(CHECKPOINT)

clean:
	rm -rf $(VENV) build dist *.egg-info runs
