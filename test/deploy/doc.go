// Package deploy looks at what deploy/ renders to. What a real API server and a real node make of it, test/kube tells.
package deploy
