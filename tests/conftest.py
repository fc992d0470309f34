import os

# before torch is imported: spinning threads double the CPU time of small kernels on shared cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub

from mlflow_server import empty_database, mlflow_file, mlflow_server, mlflow_store  # noqa: F401 (fixtures of all files)
from orchestra import prefect_server  # noqa: F401
