"""Per-agent profiles: schema, store, and the ``profile`` verb."""
