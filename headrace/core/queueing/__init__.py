"""The waiting queue: classes by share, tenants of a class by share, requests of a tenant by their order."""
