module github.com/crust-proxy/crust-proxy

go 1.26
