"""Who shares memory with whom: places in storages, views, writes. Knows neither tracing nor the transform."""
