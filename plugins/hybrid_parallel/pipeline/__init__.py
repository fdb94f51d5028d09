"""Pipeline parallelism: schedules as data, one runtime, point-to-point communication."""
