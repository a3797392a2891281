//go:build system

package cluster

import (
	"crypto/x509/pkix"
	"fmt"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// Kubeconfig makes a kubeconfig for an identity of its own, and gives its path.
// The certificate is beside it, in one file with its key, as kubelet keeps its own.
func (c *ControlPlane) Kubeconfig(user string, groups ...string) (string, error) {
	file := strings.NewReplacer(":", "-", "/", "-").Replace(user)
	certificate, err := c.authority.issue(file, pkix.Name{CommonName: user, Organization: groups})
	if err != nil {
		return "", fmt.Errorf("certificate of %s: %w", user, err)
	}
	config := api.NewConfig()
	config.Clusters["test"] = &api.Cluster{Server: c.URL, CertificateAuthority: c.authority.file()}
	config.AuthInfos[user] = &api.AuthInfo{ClientCertificate: certificate, ClientKey: certificate}
	config.Contexts["test"] = &api.Context{Cluster: "test", AuthInfo: user}
	config.CurrentContext = "test"
	path := c.Dir + "/" + file + ".kubeconfig"
	return path, clientcmd.WriteToFile(*config, path)
}

// NodeKubeconfig makes the kubeconfig that kubelet has on a node of that name.
func (c *ControlPlane) NodeKubeconfig(node string) (string, error) {
	return c.Kubeconfig("system:node:"+node, "system:nodes")
}

// restConfig reads a kubeconfig. Tests are not slowed down.
func restConfig(path string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	return config, nil
}
