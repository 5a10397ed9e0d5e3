# One command a task; `make help` lists them. Nothing here names a package index: pip's own configuration chooses it.

SHELL := bash
.ONESHELL:
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PACKAGES := npu-ops npu-parallel npu-train npu-debug
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/torchtitan-ascend
PYTHON ?= $(shell for p in python3.11 python3; do command -v $$p >/dev/null && \
	$$p -c 'import sys; sys.exit(not (3, 11, 5) <= sys.version_info[:3] < (3, 12))' && echo $$p && break; done)
UV_VERSION := 0.13.9
UV = $(shell command -v uv || echo $(CACHE)/uv-$(UV_VERSION)/bin/uv)
RUN = .venv/bin/
SIM = .venvs/sim/bin/
# torch_npu has a file of its own: on a machine without CANN it breaks a plain `import torch`.
PINS := wheelhouse/requirements.txt wheelhouse/requirements-npu.txt

# torch_npu breaks a plain `import torch` on a machine without CANN; tests load it themselves.
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
export UV_PYTHON_DOWNLOADS := never
# Some machines forbid it, and every start of Python then compiles torch and torchtitan anew (20 s).
export PYTHONDONTWRITEBYTECODE :=
# All packages at once (a minute of processor time), for the commands outside of make. CI sets it to nothing: what it
# imports, a quarter of that, is compiled on the way.
COMPILE ?= --compile-bytecode
# The theme of the site announces the end of its own support on every build; nothing else does it silence.
export NO_MKDOCS_2_WARNING := 1

.PHONY: help
help: ## List the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

.PHONY: tools
tools:
	@test -n "$(PYTHON)" || { echo "Python 3.11 (3.11.5 or newer) is needed and was not found. Install it, or name it: make sync PYTHON=/path/to/python3.11" >&2; exit 2; }
	if ! test -x "$(UV)"; then
	    echo "installing uv $(UV_VERSION) into $(CACHE)"
	    $(PYTHON) -m venv $(CACHE)/uv-$(UV_VERSION)
	    if compgen -G 'wheelhouse/wheels/uv-$(UV_VERSION)-*.whl' >/dev/null; then from='--no-index --find-links wheelhouse/wheels'; fi
	    $(CACHE)/uv-$(UV_VERSION)/bin/python -m pip install --quiet --disable-pip-version-check $${from:-} uv==$(UV_VERSION)
	fi

# The wheels live in the user's cache, so that a second clone downloads nothing; other pins have another folder there,
# because uv takes the newest wheel that it finds. An unpacked bundle is a folder of its own and is used as it is.
.PHONY: wheelhouse
wheelhouse: tools
	@key=$$(cat $(PINS) | sha256sum | cut -c1-12)
	if ! test -d wheelhouse/wheels || test -L wheelhouse/wheels; then
	    mkdir -p $(CACHE)/wheels-$$key
	    ln -sfn $(CACHE)/wheels-$$key wheelhouse/wheels
	fi
	if ! test -e wheelhouse/wheels/.complete-$$key; then
	    echo "downloading the pinned wheels (about 3 GB the first time)"
	    $(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
	        $(PINS:%=-r %) -d wheelhouse/wheels 2> >(grep -v 'is ignored: it is neither' >&2)
	    touch wheelhouse/wheels/.complete-$$key
	fi

.PHONY: sync
sync: wheelhouse ## Set up .venv with all packages and tools
	@$(UV) sync --quiet --locked --offline --all-packages $(COMPILE) --python $(PYTHON)

.PHONY: lock
lock: tools ## Renew the pins: wheelhouse/requirements.txt and uv.lock
	@$(UV) pip compile --quiet --no-config --universal --python-version 3.11.5 --generate-hashes \
	    --no-annotate --no-header --all-extras packages/*/pyproject.toml \
	    --group pyproject.toml:dev --group pyproject.toml:docs \
	    $(foreach p,$(PACKAGES),--no-emit-package $(p)) -o wheelhouse/all.txt
	awk '/^[^ ]/ { npu = /^torch-npu==/ } { print > (npu ? "wheelhouse/requirements-npu.txt" : "wheelhouse/requirements.txt") }' wheelhouse/all.txt
	rm wheelhouse/all.txt
	$(MAKE) wheelhouse
	$(UV) lock --offline --python $(PYTHON)

.PHONY: train
train: sync ## Set up, then train a small language model on this machine
	@$(RUN)npu-train run quickstart

.PHONY: test
test: ## Run all tests, or one package's alone with only its own dependencies: make test PKG=npu-ops
ifdef PKG
test: wheelhouse
	@test -d packages/$(PKG) || { echo "there is no package '$(PKG)'; choose one of: $(PACKAGES)" >&2; exit 2; }
	export UV_PROJECT_ENVIRONMENT=.venvs/$(PKG)
	$(UV) sync --quiet --locked --offline --package $(PKG) $(if $(filter npu-debug,$(PKG)),--extra plot --extra sim) \
	    --group test --no-default-groups --python $(PYTHON)
	test='.venvs/$(PKG)/bin/python -m pytest packages/$(PKG)/tests'
ifeq ($(PKG),npu-debug)
	# Simulated devices are a process's only ones; the tests of the C side bring their own.
	$$test -m 'not sim'
	$$test -m sim --sim
else
	$$test
endif
else
# Half of the tests wait for one process at a time, so two lanes share the cores.
test: sync sync-sim
	@log=$$(mktemp)
	$(MAKE) test-packages integration-sim --keep-going >$$log 2>&1 & packages=$$!
	failed=0
	$(MAKE) integration-cpu || failed=1
	wait $$packages || failed=1
	cat $$log
	rm $$log
	exit $$failed
endif

.PHONY: test-packages
test-packages: wheelhouse
	@failed=0
	for package in $(PACKAGES); do $(MAKE) test PKG=$$package || failed=1; done
	exit $$failed

.PHONY: integration integration-cpu integration-sim
integration: integration-cpu integration-sim ## Only the tests that need several processes or packages

integration-cpu: sync
	@$(RUN)python -m pytest tests-integration -m "not sim" --durations=15

integration-sim: sync-sim
	@$(SIM)python -m pytest tests-integration -m sim --sim --durations=5

.PHONY: sync-sim
sync-sim: wheelhouse ## Set up .venvs/sim: .venv with torch_npu, for simulated NPUs
	@UV_PROJECT_ENVIRONMENT=.venvs/sim $(UV) sync --quiet --locked --offline --all-packages --extra npu --extra sim --python $(PYTHON)

.PHONY: lint
lint: sync ## Check style, formatting and import rules
	@$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)lint-imports

.PHONY: docs
docs: sync ## Build the site into site/, strictly
	@$(RUN)mkdocs build --strict --quiet

.PHONY: docs-serve
docs-serve: sync ## Serve the site on this machine while editing
	@$(RUN)mkdocs serve

.PHONY: bench
bench: sync sync-sim ## Measure against torchtitan's own trainer, SDPA with a dense mask, and the CPU (simulated NPUs)
	@failed=0
	for file in packages/npu-ops/benchmarks/bench_*.py packages/npu-train/benchmarks/bench_*.py; do
	    $(RUN)python $$file || failed=1
	done
	$(SIM)python packages/npu-debug/benchmarks/bench_sim.py || failed=1
	exit $$failed

.PHONY: wheelhouse-bundle
wheelhouse-bundle: wheelhouse ## Pack all wheels for a machine without internet
	@$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps uv==$(UV_VERSION) -d wheelhouse/wheels 2>/dev/null
	tar --dereference -cf wheelhouse/wheelhouse.tar.part -C wheelhouse wheels
	mv wheelhouse/wheelhouse.tar.part wheelhouse/wheelhouse.tar
	echo "wheelhouse/wheelhouse.tar: copy it to the same place in a clone there, then: tar -xf wheelhouse/wheelhouse.tar -C wheelhouse && make sync"
