"""From a module that somebody wrote to an exported graph, with reasons where it cannot be done."""
