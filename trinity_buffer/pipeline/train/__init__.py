"""From decisions to gradient steps: leased, loaded, collated, committed."""
