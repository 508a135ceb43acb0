"""Models of cost that run nothing: pure arithmetic on geometry and measured counts."""
