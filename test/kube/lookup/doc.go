// Package lookup has the daemon's look-up of pods ask a real API server, with Node
// authorization and NodeRestriction, by a node's own identity.
package lookup
