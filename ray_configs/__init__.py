"""Configurations for Ray: serve configs, cluster definitions, job environments and dashboards."""
