# A target is a line or two. What takes more is a script in tools/.
PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
DOCS_VENV ?= .venv-docs
PAGETILE_CUDA ?= OFF
export PYTHON PAGETILE_CUDA

BIN := $(VENV)/bin
INSTALLED := .pagetile-cuda-$(PAGETILE_CUDA)
SOURCES := $(shell find CMakeLists.txt pyproject.toml README.md LICENSE cmake cpp python tools/build_backend -type f ! -name '*.pyc')

.DEFAULT_GOAL := help
.PHONY: help demo test lint sanitize coverage docs docs-links bench results wheel sdist prices cuda cross-arm gpu-sanitize cpp-example cpp-example-gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO_VENV)/$(INSTALLED) ## install the CPU build into a new environment and decode a batch over a paged cache
	$(DEMO_VENV)/bin/python examples/quickstart.py

test: $(VENV)/$(INSTALLED) ## run the tests against the installed package (PAGETILE_CUDA=ON: with the CUDA kernels)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/$(INSTALLED) ## check formats, ruff, and the types of the installed package
	$(BIN)/pre-commit run --all-files --show-diff-on-failure
	$(BIN)/mypy --strict -p pagetile

sanitize: $(VENV)/.tools ## run tests on a CPU build with the address and undefined-behaviour sanitizers
	tools/sanitize_cpu.sh $(VENV) $(PYTEST_ARGS)

coverage: $(VENV)/.tools ## run the tests on an instrumented build; fail under 95 % of lines, Python or C++
	tools/coverage.sh $(VENV)

docs: $(DOCS_VENV)/.tools ## build the site from docs/ and the docstrings into build/site; what leads nowhere fails
	$(DOCS_VENV)/bin/sphinx-build -q -E -W --keep-going -d build/doctrees docs build/site

docs-links: $(DOCS_VENV)/.tools ## check the links to other sites, which needs a network
	$(DOCS_VENV)/bin/sphinx-build -q -E -W --keep-going -d build/doctrees -b linkcheck docs build/links

bench: $(VENV)/$(INSTALLED) ## run the benchmarks
	tools/bench.sh $(VENV)

results: $(VENV)/$(INSTALLED) ## on an H200: measure again, write the tables of bench/results/h200.md and the plots (PAGETILE_CUDA=ON)
	PYTHON=$(BIN)/python bench/run_all.sh h200

wheel: dist/.built ## build the wheel with the CUDA kernels into dist/: all architectures of a release, tagged by auditwheel
	tools/check_wheel.sh dist/*.whl
	$(BIN)/abi3audit --strict --report dist/*.whl
	$(BIN)/check-wheel-contents dist/*.whl

sdist: $(VENV)/.tools ## make the source archive in dist/; build, install and run the CPU build of it
	tools/check_sdist.sh $(VENV)

prices: ## build the wheel with every file compiled anew; write what each kernel costs into docs/build.md
	rm -f dist/.built
	CCACHE_RECACHE=1 $(MAKE) dist/.built
	$(BIN)/python tools/price_list.py

cuda: wheel ## the same, then check its log for spills, local memory and lost performance
	tools/check_build_log.sh build/wheel.log

cpp-example: $(VENV)/.tools ## install the C++ library, then build and run examples/cpp against it
	tools/cpp_example.sh $(VENV)

cpp-example-gpu: dist/.built ## the same with the library of the CUDA wheel; runs on a GPU if there is one
	tools/cpp_example_gpu.sh $(VENV)

cross-arm: $(VENV)/.tools ## compile the C++ library for 64-bit Arm and run its example in an emulator
	tools/cross_arm.sh $(VENV)

gpu-sanitize: dist/.built ## on a machine with a GPU: all kernels under compute-sanitizer
	PYTHON=$(BIN)/python tools/gpu_sanitize.sh dist/*.whl

clean: ## remove what was built, the environments too
	rm -rf build dist $(VENV) $(DEMO_VENV) $(DOCS_VENV)

$(VENV)/.tools: pyproject.toml tools/make_venv.sh
	tools/make_venv.sh $(VENV) --group dev

$(VENV)/$(INSTALLED): $(SOURCES) $(VENV)/.tools
	tools/install.sh $(VENV) $(INSTALLED)

$(DOCS_VENV)/.tools: pyproject.toml tools/make_venv.sh
	tools/make_venv.sh $(DOCS_VENV) --group docs

$(DEMO_VENV)/.tools: tools/make_venv.sh
	tools/make_venv.sh $(DEMO_VENV) tqdm

$(DEMO_VENV)/$(INSTALLED): $(SOURCES) $(DEMO_VENV)/.tools
	tools/install.sh $(DEMO_VENV) $(INSTALLED)

dist/.built: $(SOURCES) $(VENV)/.tools tools/build_wheel.sh tools/old_glibc.sh tools/old_libstdcxx.py
	tools/build_wheel.sh $(VENV)
