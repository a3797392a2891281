// Package blocks has crust-backup ask the Kubernetes service for the blocks of snapshots: with
// a real API server, crust-driver, and a server with the wire of external-snapshot-metadata.
package blocks
