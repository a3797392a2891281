package cluster

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Where crust-proxy has what is its own: the defaults of a node.
const (
	ProxyRunDir = "/run/crust-proxy"
	AdminSocket = ProxyRunDir + "/admin.sock"
	httpSocket  = ProxyRunDir + "/http.sock"
	handlerTemp = "/run/crust-temp"
)

// ProxySettings is what tests change in crust-proxy's configuration.
type ProxySettings struct {
	// Rules are those of the policy, as YAML in one line.
	Rules string
	// Cluster is how it looks pods up, as YAML in one line; empty is not at all.
	Cluster string
	// Front is the front's section, as YAML in one line; it is on unless set.
	Front string
	// Extra is YAML added to the configuration.
	Extra string
}

// DefaultProxy is what tests get that ask for nothing else: volumes of pods in the
// runtime class Crust are deferred, and kubelet's own access is used to look pods up.
func (c *Cluster) DefaultProxy() ProxySettings {
	return ProxySettings{
		Rules:   fmt.Sprintf("[{name: crust-pods, runtimeHandlers: [%s], defer: true, thenOnHost: allow}]", Crust),
		Cluster: fmt.Sprintf("{kubeconfig: %q, nodeName: %s}", c.NodeAccess, NodeName),
	}
}

// ConfigureProxy restarts crust-proxy with other settings; with the same ones it does nothing.
func (c *Cluster) ConfigureProxy(settings ProxySettings) error {
	if settings == c.settings && c.Proxy.Alive() {
		return nil
	}
	if err := c.Proxy.Stop(); err != nil {
		return err
	}
	if err := c.writeProxyConfig(settings); err != nil {
		return err
	}
	return c.Proxy.Start()
}

func (c *Cluster) writeProxyConfig(settings ProxySettings) error {
	front, programs, sockets := cmp.Or(settings.Front, "{enabled: true}"), c.crustRunc, "/run/crust-runc"
	if c.VM != nil {
		programs, sockets = programs+", "+c.VM.Program, sockets+", "+c.VM.State
	}
	text := fmt.Sprintf(`handlers:
  kata: {enabled: false}
  crust: {enabled: true, programs: [%[1]s], socketDirs: [%[8]s], tempDir: %[2]s}
front: %[6]s
containerd: {socket: %[3]s}
http: {listen: "unix:%[4]s"}
log: {level: %[7]s}
policy: {rules: %[5]s}
`, programs, handlerTemp, c.Containerd.Socket, httpSocket, settings.Rules, front, c.logLevel, sockets)
	if settings.Cluster != "" {
		text += "cluster: " + settings.Cluster + "\n"
	}
	c.settings = settings
	return os.WriteFile(c.ProxyConfig(), []byte(text+settings.Extra+"\n"), 0o600)
}

// ProxyConfig is crust-proxy's configuration file.
func (c *Cluster) ProxyConfig() string { return c.Dir + "/crust-proxy.yaml" }

func (c *Cluster) proxy(program string) *rig.Process {
	check.Must(c.t, c.writeProxyConfig(c.DefaultProxy()))
	p := c.process("crust-proxy", "--config", c.ProxyConfig())
	p.Program = program
	p.Ready = func() error { _, err := ProxyHTTP("/readyz"); return err }
	return p
}

// ProxyHTTP gets a page of crust-proxy, such as /metrics.
func ProxyHTTP(path string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return rig.Get(ctx, httpSocket, path)
}
