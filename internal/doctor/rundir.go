package doctor

import (
	"context"
	"os"
)

// checkRunDir: records must die with a reboot, as the mounts they speak of do.
func checkRunDir(_ context.Context, n Node, _ Daemon) []Finding {
	info, err := os.Stat(n.at(n.RunDir))
	if err != nil {
		makes := "its unit makes the directory (RuntimeDirectory=)"
		if n.Service.InPod {
			makes = "the daemon makes the directory in the node's /run, which the DaemonSet mounts"
		}
		return []Finding{failure(n.Service.Status()+"; "+makes,
			"the run directory %s cannot be used: %v", n.RunDir, err)}
	}
	if !info.IsDir() {
		return []Finding{failure("remove the file, then: "+n.Service.Restart(), "%s is not a directory", n.RunDir)}
	}
	m, problem := n.mountOf(n.RunDir)
	if m == nil {
		return []Finding{problem}
	}
	if m.FSType != "tmpfs" && m.FSType != "ramfs" {
		return []Finding{failure("let the run directory lie below /run",
			"%s lies on %s (%s), not on tmpfs: its records would outlive a reboot, which the mounts do not", n.RunDir, m.FSType, m.Mountpoint)}
	}
	return []Finding{okay("%s lies on %s", n.RunDir, m.FSType)}
}
