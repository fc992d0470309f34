# Two commands do everything: `make demo` and `make test`. Each makes its own environment in .venv when there is none.
PYTHON ?= python3
RUN := .venv/bin/python
export OMP_WAIT_POLICY ?= PASSIVE # spinning threads double the CPU time of small kernels on shared cores
unexport PYTHONDONTWRITEBYTECODE # the tests start hundreds of processes; compiling torch's modules anew takes each of them seconds

# Independent clients of tests/interop, each in an environment of its own (z-lab's package is called `dflash` too)
CLIENTS := zlab transformers llamacpp vllm speculators
CLIENTS_IN_CI := zlab transformers llamacpp

# Prefect embedded and MLflow in a file, both under demo/; whatever server is configured is left alone
DEMO := env -u PREFECT_API_URL -u PREFECT_PROFILE PREFECT_HOME="$(CURDIR)/demo/.prefect" PREFECT_UI_URL=http://127.0.0.1:4200 \
	MLFLOW_TRACKING_URI="sqlite:///$(CURDIR)/demo/mlflow.db" PREFECT_SERVER_ANALYTICS_ENABLED=false \
	MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false

.PHONY: demo ui test test-slow test-interop test-interop-ci lint

demo: .venv/.installed
	@echo "A drafter for SmolLM2-135M-Instruct: trained for one epoch on 958 of its own answers, judged by real decoding of held-out"
	@echo "prompts, registered. It takes about 10 minutes on two current CPU cores; nothing is downloaded but the target."
	$(RUN) demo/fetch_target.py demo/SmolLM2-135M-Instruct
	$(DEMO) $(RUN) -m flows.train --config deployments/smollm2-cpu.yaml
	@echo
	@echo "make ui    shows the run: Prefect at http://127.0.0.1:4200, MLflow at http://127.0.0.1:5000"

ui: .venv/.installed
	@echo "Prefect at http://127.0.0.1:4200, MLflow at http://127.0.0.1:5000; Ctrl-C ends both"
	@trap 'kill $$(jobs -p)' INT TERM; \
	$(DEMO) $(RUN) -m prefect server start --host 127.0.0.1 --port 4200 & \
	$(DEMO) $(RUN) -m mlflow server --host 127.0.0.1 --port 5000 --workers 1 \
		--backend-store-uri "sqlite:///$(CURDIR)/demo/mlflow.db" --artifacts-destination demo/mlartifacts & \
	wait

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
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,cluster]'
	touch $@
