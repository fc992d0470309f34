# Two commands do everything: `make demo` and `make test`. Each makes its own environment in .venv when there is none.
PYTHON ?= python3
RUN := .venv/bin/python
export OMP_WAIT_POLICY ?= PASSIVE # spinning threads double the CPU time of small kernels on shared cores

# Independent clients of tests/interop, each in an environment of its own (z-lab's package is called `dflash` too)
CLIENTS := zlab transformers llamacpp vllm speculators
CLIENTS_IN_CI := zlab transformers llamacpp

.PHONY: demo test test-slow test-interop test-interop-ci lint

demo: .venv/.installed
	@echo "A drafter for SmolLM2-135M-Instruct, trained for one epoch on 958 of its own answers; then real decoding of held-out prompts"
	@echo "with it, against an untrained one. It takes about 10 minutes on two current CPU cores; nothing is downloaded but the target."
	$(RUN) demo/fetch_target.py demo/target
	$(RUN) -m dflash.train --config deployments/smollm2-cpu.yaml --run.name untrained --run.max_steps 0 \
		--data.heldout_path none
	$(RUN) -m dflash.train --config deployments/smollm2-cpu.yaml
	$(RUN) -m dflash.evaluate "$$(ls -d demo/runs/demo-*/checkpoints/step-* | tail -n 1)" \
		--against "$$(ls -d demo/runs/untrained-*/checkpoints/step-* | tail -n 1)" --plot demo/runs/evaluation.png

test: .venv/.installed
	$(RUN) -m pytest -m "not slow and not interop"

test-slow: .venv/.installed
	$(RUN) -m pytest -m slow

test-interop: .venv/.installed $(CLIENTS:%=.venv-interop/%/.installed)
	$(RUN) -m pytest -m interop

test-interop-ci: .venv/.installed $(CLIENTS_IN_CI:%=.venv-interop/%/.installed)
	$(RUN) -m pytest -m interop

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright

# torch comes with what it needs on this machine; the rest of a client's list is complete
define install_client
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< torch
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
endef

.venv-interop/%/.installed: tests/interop/%.txt
	$(install_client)
	touch $@

# llama.cpp's converter comes with the source of xllamacpp only
.venv-interop/llamacpp/.installed: tests/interop/llamacpp.txt
	$(install_client)
	$(@D)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary xllamacpp \
		--dest $(@D)/source "$$(grep ^xllamacpp== $<)"
	mkdir $(@D)/converter
	tar -xzf $(@D)/source/xllamacpp-*.tar.gz -C $(@D)/converter --strip-components 3 --wildcards \
		'*/llama.cpp/conversion' '*/llama.cpp/gguf-py/gguf'
	touch $@

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
