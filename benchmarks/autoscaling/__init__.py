"""Policies of scaling, compared on traces and synthetic loads in the simulator."""
