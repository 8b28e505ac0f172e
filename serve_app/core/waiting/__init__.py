"""The parts of `core.admission`: levels, tenants, capacity, bounds, forecasts."""
