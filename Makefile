# Thin names over the CMake presets. Each target does all of its own set-up, and is quick the second time.
.DEFAULT_GOAL := help
.PHONY: help demo test check bench fuzz mutate aot format format-check docs explore install wheels deb aarch64 \
  clean packages

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 3600
MUTANTS ?= 100

BIN := build/release
SOURCES = $(shell git ls-files '*.cpp' '*.hpp' '*.h' '*.c' '*.cu' '*.cuh' '*.inc' ':!third_party')
# The tests find this environment's python3 first, at configure time and when they run.
export VIRTUAL_ENV := $(CURDIR)/build/venv
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)
export JOBS
# Looked for by each recipe, after the packages are installed: the wheel's library is the one that was just built.
export CMAKE_C_COMPILER_LAUNCHER = $(shell command -v ccache)
export CMAKE_CXX_COMPILER_LAUNCHER = $(shell command -v ccache)
# Builds in other folders, and of the unpacked source distribution, are the same to it by relative paths.
export CCACHE_BASEDIR := $(CURDIR)

help:
	@echo 'make demo          build, then compare Tessera with standard attention (and PyTorch if present) for a'
	@echo '                   minute, on a GPU if present: a table and out/compare.png'
	@echo 'make test          build and run the tests that a change is tried with'
	@echo 'make check         the rest: every case, every prebuilt kernel, then the sanitizers (PART=1/4 for a quarter)'
	@echo 'make bench         every speed and memory cell, relative to this machine (FILTER=regex for some)'
	@echo 'make fuzz          draw random programs and cases until one fails or FUZZ_SECONDS (3600) have passed'
	@echo 'make mutate        plant MUTANTS (100) small faults in the sources, one at a time; list those tests miss'
	@echo 'make format        clang-format every source; make format-check only looks'
	@echo 'make docs          make docs/images, docs/status.md and the pages of docs/reference that are generated again'
	@echo 'make explore       make the data of docs/explore/index.html again, from tessera trace'
	@echo 'make aot           compile the common CUDA kernels ahead of time, beside the library (needs NVRTC, no GPU;'
	@echo '                   ARCHS="90 120" for some architectures, else all)'
	@echo 'make aarch64       every case of the kernels for AArch64, cross-compiled and run by qemu (needs'
	@echo '                   g++-aarch64-linux-gnu and qemu-user)'
	@echo 'make wheels        the artefacts of a release into dist/: the sdist, and wheels for Python 3.10 and later,'
	@echo '                   x86-64 and AArch64, with prebuilt kernels (needs python3.10, 3.11, 3.12 and'
	@echo '                   g++-aarch64-linux-gnu)'
	@echo 'make install       the library and the program into PREFIX (/usr/local)'
	@echo 'make deb           the same as Debian packages, into dist/'

packages:
	@bash scripts/install_packages.sh debian-packages-install.txt debian-packages.txt

build/venv/.done: tests/requirements.txt scripts/make_venv.sh | packages
	@bash scripts/make_venv.sh build/venv tests/requirements.txt
	@touch $@

build/docs-venv/.done: docs/requirements.txt scripts/make_venv.sh | packages
	@bash scripts/make_venv.sh build/docs-venv docs/requirements.txt
	@touch $@

$(BIN)/build.ninja: | packages build/venv/.done
	cmake --preset release

# Only what a target needs.
build-%: $(BIN)/build.ninja
	@cmake --build --preset release --parallel $(JOBS) --target $*

demo: build-tessera_cli
	@bash scripts/demo.sh

# Without it the recipe is not tested.
build/conan-venv/.done: tests/install/requirements-conan.txt scripts/make_venv.sh | packages
	-@bash scripts/make_venv.sh build/conan-venv tests/install/requirements-conan.txt && touch $@

check: build/conan-venv/.done
test check: packages build/venv/.done
	@bash scripts/run_tests.sh $@

bench: build-tessera_bench
	@mkdir -p out
	@$(BIN)/bench/tessera_bench --json out/bench.json $(if $(FILTER),--filter '$(FILTER)')

fuzz: build-tessera_fuzz build-tessera_program_fuzz
	@$(BIN)/tests/tessera_program_fuzz --seconds $$(($(FUZZ_SECONDS) / 10))
	@$(BIN)/tests/tessera_fuzz --seconds $(FUZZ_SECONDS)

build/mutate-venv/.done: tests/requirements-mutate.txt scripts/make_venv.sh | packages
	@bash scripts/make_venv.sh build/mutate-venv tests/requirements-mutate.txt
	@touch $@

mutate: build/mutate-venv/.done build/venv/.done
	@build/mutate-venv/bin/python scripts/mutate.py --count $(MUTANTS)

format: packages
	@clang-format -i $(SOURCES)

format-check: packages
	@clang-format --dry-run -Werror $(SOURCES) && echo 'format-check: $(words $(SOURCES)) files are formatted'
	@python3 scripts/check_lines.py

docs: build-tessera_cli build/docs-venv/.done
	@build/docs-venv/bin/python scripts/make_figures.py --tessera $(BIN)/cli/tessera --out docs/images
	@build/docs-venv/bin/python examples/pathfinder/pathfinder.py --sheet docs/images/pathfinder.png
	@build/docs-venv/bin/python scripts/make_status.py
	@build/docs-venv/bin/python scripts/make_quantized_errors.py
	@build/docs-venv/bin/python scripts/make_support.py $(BIN)/cli/tessera

explore: build-tessera_cli build/venv/.done
	@build/venv/bin/python scripts/make_explore.py --tessera $(BIN)/cli/tessera

aot: $(BIN)/build.ninja
	@cmake --preset release "-DTESSERA_PREBUILD_ARCHS=$(ARCHS)" > /dev/null
	@$(MAKE) --no-print-directory build-tessera_prebuild

# Every case, on every instruction set of that processor.
aarch64: packages
	@bash scripts/aarch64_test.sh all

# The artefacts of a release into dist/.
wheels: aot
	@build/venv/bin/python scripts/make_wheels.py --kernels $(BIN)/src/tessera/aot

# A build of its own, of what is installed: the library and the program, with the kernels that `make aot` has compiled.
# No tests, no Python environment.
install:
	@bash scripts/install_packages.sh debian-packages-install.txt
	@cmake --preset install "-DCMAKE_INSTALL_PREFIX=$(PREFIX)" \
	  "-DTESSERA_PREBUILT_FOLDER=$(CURDIR)/$(BIN)/src/tessera/aot" $(CMAKE_OPTIONS)
	@cmake --build --preset install --parallel $(JOBS)
	@cmake --install build/install

# Of the same build, for /usr.
deb:
	@bash scripts/install_packages.sh debian-packages-install.txt
	@cmake --preset install -DCMAKE_INSTALL_PREFIX=/usr \
	  "-DTESSERA_PREBUILT_FOLDER=$(CURDIR)/$(BIN)/src/tessera/aot" $(CMAKE_OPTIONS)
	@cmake --build build/install --parallel $(JOBS)
	@rm -rf build/debian
	@cpack --config build/install/CPackConfig.cmake -G DEB -B build/debian
	@mkdir -p dist && cp build/debian/*.deb dist/

clean:
	rm -rf build out dist
