"""Published models, from Python packages that carry their weights. Without a package its tests are skipped."""
