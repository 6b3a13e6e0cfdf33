"""How fast a machine is: profiles of clusters, and the time that operators and collectives take."""
