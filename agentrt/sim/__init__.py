"""Whole runs in virtual time: traffic, a simulated device, and tables that compare policies."""
