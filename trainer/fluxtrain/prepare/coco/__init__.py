"""COCO-2014's validation subset for MLPerf."""
