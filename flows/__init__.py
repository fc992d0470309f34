"""What happens, in order: one file per kind of run."""

import os

# before prefect is imported: an embedded server on a fresh home makes its tables first, which takes longer than its default of 20 s
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
