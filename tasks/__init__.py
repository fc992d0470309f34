"""How Prefect, MLflow and the machine take part in a run: each file is a stage of the flow or what the stages share."""
