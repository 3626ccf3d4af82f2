# The two commands to start with: `make demo` and `make test`. Each makes the environment that it needs.
#
# PYTHON=python3.12          another interpreter for the environments
# PIP_FLAGS="--index-url …"  further options of `pip install`
# DEMO_FLAGS="--data DIR"    further options of examples/train_llama.py
# COMPARE_FLAGS="--only amsp --only zero1"  further options of `amsp compare`

PYTHON ?= python3
PIP_FLAGS ?=
DEMO_FLAGS ?=
COMPARE_FLAGS ?=
DEEPSPEED := 0.19.8
VERSIONS := 0.19.5 0.19.6 newest

VENV := .venv
INPUTS := setup.py pyproject.toml constraints.txt Makefile

# $(call environment,FOLDER,DEEPSPEED REQUIREMENT,EXTRA): a virtual environment with the package from this
# folder. DeepSpeed comes as source: DS_BUILD_OPS=0 compiles none of its kernels, none is needed here.
define environment
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	DS_BUILD_OPS=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_DEFAULT_TIMEOUT=120 \
	  $(1)/bin/python -m pip install --quiet --retries 10 --use-pep517 --constraint constraints.txt \
	  $(PIP_FLAGS) "$(2)" --editable ".[$(3)]"
	touch $@
endef

.PHONY: demo compare test lint test-cluster test-versions clean $(VERSIONS:%=test-on-%)

# Four CPU ranks of one machine, cut into 2 nodes of 2 by topology.gpus_per_node. The port is a free one.
demo: $(VENV)/.demo
	DS_ACCELERATOR=cpu $(VENV)/bin/deepspeed --quiet --num_gpus 4 \
	  --master_port $$($(VENV)/bin/python -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])') \
	  examples/train_llama.py --deepspeed --deepspeed_config configs/amsp_demo.json \
	  --run-dir runs/demo --max-seconds 130 $(DEMO_FLAGS)

# Every strategy on an emulated cluster of 2 nodes x 2 ranks: about 7 minutes on two quiet cores, and some more the
# first time for the environment of MiCS, which is made beside the others. Slow links need root and iproute2.
compare: $(VENV)/.demo
	AMSP_COMPARE_ENVIRONMENTS=$(CURDIR)/.venv-compare DS_ACCELERATOR=cpu PIP_CONSTRAINT=$(CURDIR)/constraints.txt \
	  $(VENV)/bin/amsp compare --config configs/ab.yaml $(COMPARE_FLAGS)

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# DeepSpeed's launcher between two nodes that are emulated on this machine, through pdsh and ssh. Needs root. On Debian
# and its relatives it installs what is missing; the package of the ssh server may start the machine's own, too.
test-cluster: $(VENV)/.test
	command -v sshd && command -v pdsh && command -v ip || \
	  { apt-get update && apt-get install --yes --no-install-recommends openssh-server openssh-client pdsh iproute2; }
	AMSP_NIGHTLY=1 $(VENV)/bin/python -m pytest tests/cluster

# The engine's tests on each supported DeepSpeed, each in an environment of its own.
test-versions: $(VERSIONS:%=test-on-%)

$(VERSIONS:%=test-on-%): test-on-%: .venv-ds-%/.test
	.venv-ds-$*/bin/python -c 'import deepspeed; print("DeepSpeed", deepspeed.__version__)'
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv-ds-$*/extensions \
	  .venv-ds-$*/bin/python -m pytest $(wildcard tests/engine tests/versions)

$(VENV)/.demo: $(INPUTS)
	$(call environment,$(VENV),deepspeed==$(DEEPSPEED),demo)

$(VENV)/.test: $(INPUTS)
	$(call environment,$(VENV),deepspeed==$(DEEPSPEED),test)

.venv-ds-newest/.test: $(INPUTS)
	$(call environment,.venv-ds-newest,deepspeed>=$(DEEPSPEED)$(comma)<0.20,test)

.venv-ds-%/.test: $(INPUTS)
	$(call environment,.venv-ds-$*,deepspeed==$*,test)

comma := ,

clean:
	rm -rf $(VENV) .venv-ds-* .venv-compare runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
