-- Run once by the postgres image, on an empty volume: each server migrates a database of its own.
create database prefect;
create database mlflow;
