"""Reports: figures, tables, sentences and pages made from a comparison."""
