"""What `make` runs beside the product: `install` and `lock` before anything is installed, `release` and
`dashboards` in `.venv`."""
