"""mpar"""
