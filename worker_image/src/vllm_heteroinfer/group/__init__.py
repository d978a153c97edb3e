"""What the ranks of a group and its engine agree on: how they meet, what they compare, how they count."""
