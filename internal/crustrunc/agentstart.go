package crustrunc

import (
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// startAgent starts an agent where none answers. It is not waited for: the broker
// runs the program until the agent serves.
func startAgent(cfg Config) error {
	conn, err := net.DialTimeout("unix", cfg.AgentSocket(), time.Second)
	if err == nil {
		return conn.Close()
	}
	cmd := exec.Command(cfg.AgentProgram) //nolint:gosec // by our own configuration
	cmd.Dir = "/"
	cmd.Env = childEnvironment()
	// Neither the container's streams nor its console may be kept open by it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	return cmd.Process.Release()
}

// childEnvironment is what our own processes need to find the same configuration.
func childEnvironment() []string {
	env := []string{"PATH=" + os.Getenv("PATH")}
	if file := os.Getenv(configVariable); file != "" {
		env = append(env, configVariable+"="+file)
	}
	return env
}
