"""Growth of a tree with a drafter: in a draft replica, and by a head inside the target."""
