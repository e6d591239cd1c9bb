"""Tenants and classes of service: their weights, limits, shares of the device, and admission."""
