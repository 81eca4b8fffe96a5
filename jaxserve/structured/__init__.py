"""Output held to a grammar: token masks by llguidance. The engine follows grammars; a process of its own checks them first."""
