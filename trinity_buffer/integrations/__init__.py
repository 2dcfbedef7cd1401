"""The store inside other people's trainers: a module needs the package of its name."""
