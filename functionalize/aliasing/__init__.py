"""Who shares memory with whom: layouts, views, writes. Knows neither tracing nor the transform."""
