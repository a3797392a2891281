//go:build system

package cluster

import (
	"fmt"
	"syscall"
)

// Reload puts other rules in force without a restart, as an administrator does: a
// changed file, and SIGHUP. Only the rules may differ from the settings in force.
func (k *Kube) Reload(rules string) {
	k.T.Helper()
	settings := k.settings
	settings.Rules = rules
	k.Must(k.writeProxyConfig(settings))
	if err := syscall.Kill(k.Proxy.Pid(), syscall.SIGHUP); err != nil {
		k.T.Fatal(fmt.Errorf("have crust-proxy read its configuration: %w", err))
	}
}
